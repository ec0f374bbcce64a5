"""The noise of a private masked sum, of which each client adds a share, from the settings common to all."""

from fedfrozen_app.config import Config
from fedfrozen_app.local.client_optimizer import learning_rate
from fedfrozen_app.privacy.steps import COUNT_NOISE, NOISE, SENSITIVITY
from fedfrozen_app.privacy.sum_noise import noise_of_run


def owed_noise(config: Config, server_round: int) -> dict[str, float]:
    """Noise multipliers, and the sensitivity of examples · update, −lr · Σ clipped gradients, to one unit."""
    run, rate = noise_of_run(config), learning_rate(config.client, server_round, config.num_rounds)
    owed = {NOISE: run.of_sum, SENSITIVITY: rate * config.privacy.max_grad_norm}
    return owed | {COUNT_NOISE: run.of_count} if run.share else owed
