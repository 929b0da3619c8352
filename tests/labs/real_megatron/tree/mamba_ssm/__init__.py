"""The kernels of mamba-ssm that a training needs, in plain torch: slow, differentiable."""

__version__ = "2.2.4"
