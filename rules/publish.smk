# The artifact itself is no output: snakemake would take away what stands there, file by file, before the new one is
# whole. It is told of the record alone; rules/common.smk looks whether the artifact is there.
rule publish:
    input:
        package=f"{DEVICE}/package.json",
        verification=f"{DEVICE}/verify.json",
    output:
        record=f"{DEVICE}/publish.json",
        due=[touch(path) for path in PUBLISH_DUE],
    log:
        f"{DEVICE}/logs/publish.log",
    benchmark:
        f"{DEVICE}/benchmarks/publish.tsv"
    localrule: True
    threads: 1
    params:
        code=stage_digest("publish"),
        artifact=ARTIFACT,
        metrics=f"{DEVICE}/metrics.json",
        html=f"{DEVICE}/report.html",
        max_ppl_ratio=CONFIG.max_ppl_ratio,
        min_top1_agreement=CONFIG.min_top1_agreement,
        max_logit_error=CONFIG.max_logit_error,
    shell:
        RUN
        + " publish --artifact {params.artifact:q} --metrics {params.metrics:q} --html {params.html:q}"
        + GATES_FLAGS
        + " --package {input.package:q} --verification {input.verification:q} --output {output.record:q} 2> {log:q}"
