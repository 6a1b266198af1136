rule calibrate:
    input:
        model=DENSE,
        corpus=f"{MODEL}/tokenize.json",
        shards=shards_in(MODEL, "calibrate"),
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json", shards_in(MODEL, "calibrate")),
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
        corpus=f"{MODEL}/tokenize.json",
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json"),
    output:
        record=f"{MODEL}/calibrate-shards/{{shard}}.json",
        arrays=directory(f"{MODEL}/calibrate-shards/{{shard}}"),
    log:
        f"{MODEL}/logs/calibrate/{{shard}}.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate/{{shard}}.tsv"
    params:
        settings=commands.shard(CONFIG, "calibrate"),
