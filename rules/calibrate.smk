rule calibrate:
    input:
        model=DENSE,
        corpus=CORPUS,
        shards=shards_in(MODEL, "calibrate"),
        arrays=arrays(DENSE, CORPUS, shards_in(MODEL, "calibrate")),
    output:
        record=f"{MODEL}/calibrate.json",
        arrays=directory(f"{MODEL}/calibrate"),
    log:
        f"{MODEL}/logs/calibrate.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("calibrate"),
    params:
        **commands.params(CONFIG, "calibrate"),
    shell:
        commands.job("calibrate")


use rule calibrate as calibrate_shard with:
    input:
        model=DENSE,
        corpus=CORPUS,
        arrays=arrays(DENSE, CORPUS),
    output:
        record=f"{MODEL}/calibrate-shards/{{shard}}.json",
        arrays=directory(f"{MODEL}/calibrate-shards/{{shard}}"),
    log:
        f"{MODEL}/logs/calibrate/{{shard}}.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate/{{shard}}.tsv"
    params:
        settings=commands.shard(CONFIG, "calibrate"),
