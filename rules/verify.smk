rule verify:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        package=f"{DEVICE}/package.json",
    output:
        f"{DEVICE}/verify.json",
    log:
        f"{DEVICE}/logs/verify.log",
    benchmark:
        f"{DEVICE}/benchmarks/verify.tsv"
    threads: 1
    params:
        code=stage_digest("verify"),
        artifact=ARTIFACT,
    shell:
        RUN
        + " verify --artifact {params.artifact:q} --model {input.model:q} --corpus {input.corpus:q} --package {input.package:q}"
        " --output {output:q} 2> {log:q}"
