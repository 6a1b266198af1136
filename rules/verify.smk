rule verify:
    input:
        model=SOURCE,
        original="ingest.json",
        corpus="tokenize.json",
        package=f"{DEVICE}/package.json",
    output:
        f"{DEVICE}/verify.json",
    log:
        f"{DEVICE}/logs/verify.log",
    benchmark:
        f"{DEVICE}/benchmarks/verify.tsv"
    threads: 1
    params:
        code=code("verify"),
        settings=flags("verify"),
    shell:
        job("verify")
        + " --artifact {ARTIFACT:q} --model {input.model:q} --original {input.original:q} --corpus {input.corpus:q}"
        " --package {input.package:q} 2> {log:q}"
