rule recalibrate:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        activations=f"{MODEL}/calibrate.json",
        shards=shards_in(DEVICE, "recalibrate"),
        arrays=arrays(
            SOURCE,
            f"{MODEL}/tokenize.json",
            f"{DEVICE}/allocate.json",
            f"{MODEL}/calibrate.json",
            shards_in(DEVICE, "recalibrate"),
        ),
    output:
        record=f"{DEVICE}/recalibrate.json",
        arrays=directory(f"{DEVICE}/recalibrate"),
    log:
        f"{DEVICE}/logs/recalibrate.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("recalibrate"),
    params:
        **commands.params(CONFIG, "recalibrate"),
    shell:
        commands.job("recalibrate")


use rule recalibrate as recalibrate_shard with:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        activations=f"{MODEL}/calibrate.json",
        arrays=arrays(SOURCE, f"{MODEL}/tokenize.json", f"{DEVICE}/allocate.json", f"{MODEL}/calibrate.json"),
    output:
        record=f"{DEVICE}/recalibrate-shards/{{shard}}.json",
        arrays=directory(f"{DEVICE}/recalibrate-shards/{{shard}}"),
    log:
        f"{DEVICE}/logs/recalibrate/{{shard}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate/{{shard}}.tsv"
    params:
        settings=commands.shard(CONFIG, "recalibrate"),
