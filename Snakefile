# coldpress: compile language models for devices. Names only; what a stage does is in compiler/stages/<stage>.
#
#   snakemake --config model=demo device=pixel6
#   snakemake --config matrix=builds.yaml           all builds of a file in one DAG; see compiler/workflow/matrix.py

from snakemake.utils import min_version

min_version("9.27")


include: "rules/builds.smk"


rule all:
    default_target: True
    input:
        TARGETS,
    localrule: True
