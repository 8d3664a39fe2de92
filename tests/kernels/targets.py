"""All samples of all native kernels for all targets: ``python -m tests.kernels.targets``, some minutes."""

from __future__ import annotations

from distir_relax.kernels.native.trials import TRIALS
from tests.kernels.test_kernel_targets import NAMES, compiled_samples


def main() -> None:
    """Print how many kernels are compiled for each target. Raises IsolatedCallError for one that ends the compiler."""
    for name, kernels in compiled_samples(NAMES, TRIALS, None).items():
        print(f"{name}: {len(kernels)} of {len(TRIALS)} kernels")


if __name__ == "__main__":
    main()
