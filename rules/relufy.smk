rule relufy:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=f"{MODEL}/tokenize.json",
        arrays=arrays(f"{MODEL}/ingest.json", f"{MODEL}/tokenize.json"),
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
        mem_mb=mem_mb("relufy"),
        runtime=runtime("relufy"),
    params:
        code=commands.code(CONFIG, "relufy"),
        settings=commands.settings(CONFIG, "relufy"),
        records=commands.records,
    shell:
        commands.job("relufy")
