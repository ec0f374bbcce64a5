"""`fedfrozen completion bash|zsh|fish`: a script that completes verbs, groups and keys.

The words are part of the script, so that pressing Tab does not start Python.
"""

from collections.abc import Iterator

import yaml

from fedfrozen_app.commands import VERBS
from fedfrozen_app.config import keys_of, known_keys
from fedfrozen_app.core.conf_files import choices, conf_dir
from fedfrozen_app.core.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def completion(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UserError(f"Say for which shell: fedfrozen completion {'|'.join(SHELLS)}.")
    print(script(arguments[0], words()))


def words() -> list[str]:
    """Verbs, GROUP=NAME for each file of a group, and every key with an equals sign."""
    chosen = [f"{group}={name}" for group, names in choices().items() for name in names]
    known = dict.fromkeys([*known_keys(), *_model_keys()])
    holders = {key.rpartition(".")[0] for key in known}
    keys = [key for key in known if key not in holders and not key.endswith(".name")]
    return [*VERBS, *chosen, *(f"{key}=" for key in keys), "-m"]


def _model_keys() -> Iterator[str]:
    """Keys that the models' files set, such as model.config.hidden_size."""
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        yield from keys_of(
            yaml.safe_load(path.read_text(encoding="utf-8")).get("config", {}), "model.config."
        )


def script(shell: str, found: list[str]) -> str:
    listed = " ".join(found)
    if shell == "fish":
        return f"complete -c fedfrozen -a '{listed}'"
    # bash splits words at "=": remove the part before it from the completions too.
    body = f"""_fedfrozen() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word
    word="${{line##* }}"
    COMPREPLY=($(compgen -W "{listed}" -- "$word"))
    [[ "$word" == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{word%=*}}="}}")
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _fedfrozen fedfrozen"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{body}" if shell == "zsh" else body
