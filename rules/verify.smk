rule verify:
    input:
        f"{DEVICE}/package/manifest.json",
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
    threads: 8
    resources:
        mem_mb=mem_mb("verify"),
        runtime=runtime("verify"),
    params:
        code=commands.code(CONFIG, "verify"),
        settings=commands.settings(CONFIG, "verify"),
        records=commands.records,
    shell:
        commands.job("verify")
