# coldpress: compile a language model for a device. Names and paths only; what a stage does is in compiler/stages/<stage>.
#
#   snakemake --config model=demo device=pixel6

from snakemake.utils import min_version

min_version("9.27")


include: "rules/common.smk"
include: "rules/device.smk"
include: "rules/ingest.smk"
include: "rules/tokenize.smk"
include: "rules/preflight.smk"
include: "rules/importance.smk"
include: "rules/relufy.smk"
include: "rules/calibrate.smk"
include: "rules/explore.smk"
include: "rules/allocate.smk"
include: "rules/distill.smk"
include: "rules/recalibrate.smk"
include: "rules/predict.smk"
include: "rules/size.smk"
include: "rules/place.smk"
include: "rules/order.smk"
include: "rules/gram.smk"
include: "rules/quantize.smk"
include: "rules/layout.smk"
include: "rules/plan.smk"
include: "rules/route.smk"
include: "rules/package.smk"
include: "rules/verify.smk"
include: "rules/publish.smk"
include: "rules/report.smk"
include: "rules/export.smk"


around_snakemake.time_no_shared_rule(workflow)


rule all:
    default_target: True
    input:
        f"{DEVICE}/preflight.json",
        local(f"{DEVICE}/manifest.json"),
        local(f"{DEVICE}/metrics.json"),
        local(f"{DEVICE}/report.html"),
        local(EXPORT),
    localrule: True
