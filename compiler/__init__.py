"""The offline compiler: one stage, one module, one Snakemake rule."""

__version__ = "0.1.0"
