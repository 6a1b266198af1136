rule recalibrate:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        activations="calibrate.json",
        shards=shards_in(DEVICE, "recalibrate"),
    output:
        f"{DEVICE}/recalibrate.json",
    log:
        f"{DEVICE}/logs/recalibrate.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate.tsv"
    threads: 8
    params:
        code=code("recalibrate"),
        settings=flags("recalibrate"),
    shell:
        job("recalibrate") + " --model {input.model:q} --corpus {input.corpus:q} --sparsity {input.sparsity:q}"
        " --activations {input.activations:q}" + SHARDS_FLAG + " --threads {threads} 2> {log:q}"


rule recalibrate_shard:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        activations="calibrate.json",
    output:
        f"{DEVICE}/recalibrate-shards/{{shard}}.json",
    log:
        f"{DEVICE}/logs/recalibrate/{{shard}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate/{{shard}}.tsv"
    threads: 8
    params:
        code=code("recalibrate"),
        settings=flags("recalibrate"),
        num_shards=CONFIG["calibration_shards"],
    shell:
        job("recalibrate") + " --shard {wildcards.shard} --num-shards {params.num_shards} --model {input.model:q}"
        " --corpus {input.corpus:q} --sparsity {input.sparsity:q} --activations {input.activations:q}"
        " --threads {threads} 2> {log:q}"
