# Not cached: it measures this machine's speed, and reads the artifact, which is no declared file.
rule verify:
    input:
        local(f"{DEVICE}/package/manifest.json"),
        model=SOURCE,
        original=f"{MODEL}/ingest.json",
        corpus=CORPUS,
        package=local(f"{DEVICE}/package.json"),
        arrays=arrays(SOURCE, f"{MODEL}/ingest.json", CORPUS),
    output:
        record=local(f"{DEVICE}/verify.json"),
    log:
        f"{DEVICE}/logs/verify.log",
    benchmark:
        f"{DEVICE}/benchmarks/verify.tsv"
    localrule: STORED
    threads: 8
    resources:
        **needs("verify"),
    params:
        **commands.params(CONFIG, "verify"),
    shell:
        commands.job("verify")
