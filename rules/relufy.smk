rule relufy:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=CORPUS,
        arrays=arrays(f"{MODEL}/ingest.json", CORPUS),
    output:
        record=f"{MODEL}/relufy.json",
        arrays=directory(f"{MODEL}/relufy"),
    log:
        f"{MODEL}/logs/relufy.log",
    benchmark:
        f"{MODEL}/benchmarks/relufy.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("relufy"),
    params:
        **commands.params(CONFIG, "relufy"),
    shell:
        commands.job("relufy")
