"""The offline compiler: one stage, one module, one Snakemake rule."""
