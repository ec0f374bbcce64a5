"""`fedfrozen completion bash|zsh|fish`: a script that completes verbs, groups and keys.

The words are written into the script, so that a press of Tab starts no Python.
"""

from fedfrozen_app.commands import VERBS
from fedfrozen_app.compare.grouping import flatten
from fedfrozen_app.config import choices, compose_config, resolved
from fedfrozen_app.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def completion(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UserError(f"Say for which shell: fedfrozen completion {'|'.join(SHELLS)}.")
    print(script(arguments[0], words()))


def words() -> list[str]:
    """Verbs, a word for each file of a group, and every key with its equals sign."""
    groups = choices()
    chosen = [f"{group}={name}" for group, names in groups.items() for name in names]
    keys: dict[str, None] = {}
    for strategy in groups["strategy"]:
        keys |= dict.fromkeys(flatten(resolved(compose_config([f"strategy={strategy}"]))))
    return [*VERBS, *chosen, *(f"{key}=" for key in keys if not key.endswith(".name")), "-m"]


def script(shell: str, found: list[str]) -> str:
    listed = " ".join(found)
    if shell == "fish":
        return f"complete -c fedfrozen -a '{listed}'"
    # bash cuts words at "=": the part before the cut must go from the answers too.
    body = f"""_fedfrozen() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" word
    word="${{line##* }}"
    COMPREPLY=($(compgen -W "{listed}" -- "$word"))
    [[ "$word" == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{word%=*}}="}}")
    [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
}}
complete -o default -F _fedfrozen fedfrozen"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{body}" if shell == "zsh" else body
