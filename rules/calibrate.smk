rule calibrate:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=f"{MODEL}/tokenize.json",
        shards=shards_in(MODEL, "calibrate"),
    output:
        f"{MODEL}/calibrate.json",
    log:
        f"{MODEL}/logs/calibrate.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate.tsv"
    threads: 8
    params:
        code=code("calibrate"),
        settings=flags("calibrate"),
    shell:
        job("calibrate") + " --model {input.model:q} --corpus {input.corpus:q}" + SHARDS_FLAG + " --threads {threads}"
        " 2> {log:q}"


rule calibrate_shard:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=f"{MODEL}/tokenize.json",
    output:
        f"{MODEL}/calibrate-shards/{{shard}}.json",
    log:
        f"{MODEL}/logs/calibrate/{{shard}}.log",
    benchmark:
        f"{MODEL}/benchmarks/calibrate/{{shard}}.tsv"
    threads: 8
    params:
        code=code("calibrate"),
        settings=flags("calibrate"),
        num_shards=CONFIG["calibration_shards"],
    shell:
        job("calibrate") + " --shard {wildcards.shard} --num-shards {params.num_shards} --model {input.model:q}"
        " --corpus {input.corpus:q} --threads {threads} 2> {log:q}"
