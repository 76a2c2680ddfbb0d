"""Comparison summaries under the metric names of common training frameworks.

Only metrics that a summary determines are here. A logprob that is NaN or infinite, on either side, makes
every mean NaN and every largest difference greater than 0, so that it cannot look like a perfect match.
"""

import math

from isobit.results import CompareSummary


def framework_metrics(summary: CompareSummary) -> dict[str, float]:
    """Returns the summary under the names of verl, NeMo-RL, TorchTitan, TRL and others, for a dashboard.

    Show `token_count` with every other value, since a gap of zero over zero tokens proves nothing. Show
    `impossible_count`, too: logprobs that no token is drawn with, such as 5.0, may be equal on both sides.
    """
    statistics = summary.statistics

    def mean(value: float) -> float:
        return value if 0 < statistics.num_tokens == statistics.num_finite else math.nan

    correlation = statistics.pearson_correlation
    return {
        "token_count": float(statistics.num_tokens),
        "mismatch_count": float(statistics.num_unequal),
        "impossible_count": float(statistics.num_impossible),
        # verl
        "training/rollout_probs_diff_max": statistics.max_abs_dp,
        "training/rollout_probs_diff_mean": mean(statistics.mean_abs_dp),
        "training/rollout_actor_probs_pearson_corr": mean(math.nan if correlation is None else correlation),
        "rollout_corr/kl": mean(statistics.kl_k1),
        "rollout_corr/k3_kl": mean(statistics.kl_k3),
        "rollout_corr/rollout_is_eff_sample_size": mean(
            statistics.effective_sample_size / max(statistics.num_tokens, 1)
        ),
        # NeMo-RL
        "gen_kl_error": mean(statistics.kl_k3),
        # TorchTitan
        "bit_wise/logprob_diff/max": statistics.max_abs_dlogp,
        "bit_wise/logprob_diff/mean": mean(statistics.mean_abs_dlogp),
        "bit_wise/ratio_tokens_different/mean": (
            statistics.num_unequal / statistics.num_tokens if statistics.num_tokens else math.nan
        ),
        # TRL
        "sampling/sampling_logp_difference/max": statistics.max_abs_dlogp,
        "sampling/sampling_logp_difference/mean": mean(statistics.mean_abs_dlogp),
        # slime
        "train/train_rollout_logprob_abs_diff": mean(statistics.mean_abs_dlogp),
        # prime-rl
        "mismatch_kl/all/mean": mean(statistics.kl_k3),
        # OpenRLHF
        "vllm_kl": mean(statistics.kl_k1),
    }
