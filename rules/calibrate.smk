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
        code=stage_digest("calibrate"),
        method=CONFIG.method,
    shell:
        RUN + " calibrate --method {params.method} --model {input.model:q}"
        " --corpus {input.corpus:q}" + SHARDS_FLAG + " --threads {threads} --output {output:q} 2> {log:q}"


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
        code=stage_digest("calibrate"),
        method=CONFIG.method,
        num_shards=CONFIG.calibration_shards,
    shell:
        RUN + " calibrate --shard {wildcards.shard} --num-shards {params.num_shards} --method {params.method}"
        " --model {input.model:q} --corpus {input.corpus:q} --threads {threads} --output {output:q} 2> {log:q}"
