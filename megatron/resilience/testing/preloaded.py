"""What the fork server imports before it forks ranks; imported for that, never called."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.training.training

    import megatron.resilience.job  # noqa: F401
