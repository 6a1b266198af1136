rule calibrate:
    input:
        model=DENSE,
        corpus="tokenize.json",
        shards=shards_in("", "calibrate"),
    output:
        "calibrate.json",
    log:
        "logs/calibrate.log",
    benchmark:
        "benchmarks/calibrate.tsv"
    threads: 8
    params:
        code=code("calibrate"),
        settings=flags("calibrate"),
    shell:
        job("calibrate") + " --model {input.model:q} --corpus {input.corpus:q}" + SHARDS_FLAG + " --threads {threads}"
        " 2> {log:q}"


rule calibrate_shard:
    input:
        model=DENSE,
        corpus="tokenize.json",
    output:
        "calibrate-shards/{shard}.json",
    log:
        "logs/calibrate/{shard}.log",
    benchmark:
        "benchmarks/calibrate/{shard}.tsv"
    threads: 8
    params:
        code=code("calibrate"),
        settings=flags("calibrate"),
        num_shards=CONFIG["calibration_shards"],
    shell:
        job("calibrate") + " --shard {wildcards.shard} --num-shards {params.num_shards} --model {input.model:q}"
        " --corpus {input.corpus:q} --threads {threads} 2> {log:q}"
