rule explore:
    input:
        model=DENSE,
        corpus=CORPUS,
        activations=CALIBRATED,
        arrays=arrays(DENSE, CORPUS, CALIBRATED),
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
