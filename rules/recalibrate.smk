rule recalibrate:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        activations=f"{MODEL}/calibrate.json",
    output:
        f"{DEVICE}/recalibrate.json",
    log:
        f"{DEVICE}/logs/recalibrate.log",
    benchmark:
        f"{DEVICE}/benchmarks/recalibrate.tsv"
    threads: 8
    params:
        code=stage_digest("recalibrate"),
    shell:
        RUN + " recalibrate --model {input.model:q} --corpus {input.corpus:q}"
        " --sparsity {input.sparsity:q} --activations {input.activations:q} --threads {threads}"
        " --output {output:q} 2> {log:q}"
