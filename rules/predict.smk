rule predict:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
    output:
        f"{DEVICE}/predict/{{chunk}}.json",
    log:
        f"{DEVICE}/logs/predict/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/predict/{{chunk}}.tsv"
    threads: 1
    params:
        code=stage_digest("predict"),
        seed=CONFIG.seed,
        layers=layers,
    shell:
        RUN + " predict --seed {params.seed} --model {input.model:q} --activations {input.activations:q}"
        " --sparsity {input.sparsity:q} --layers {params.layers} --threads {threads} --output {output:q} 2> {log:q}"
