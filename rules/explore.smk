rule explore:
    input:
        model=DENSE,
        corpus=f"{MODEL}/tokenize.json",
        activations=f"{MODEL}/calibrate.json",
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json", f"{MODEL}/calibrate.json"),
    output:
        record=f"{MODEL}/explore.json",
        arrays=directory(f"{MODEL}/explore"),
    log:
        f"{MODEL}/logs/explore.log",
    benchmark:
        f"{MODEL}/benchmarks/explore.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("explore"),
    params:
        **commands.params(CONFIG, "explore"),
    shell:
        commands.job("explore")
