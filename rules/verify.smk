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
        code=code("verify"),
        settings=flags("verify", artifact=ARTIFACT),
    shell:
        job("verify") + " --model {input.model:q} --corpus {input.corpus:q} --package {input.package:q} 2> {log:q}"
