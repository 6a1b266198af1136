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
        code=code("predict"),
        settings=flags("predict"),
        layers=layers,
    shell:
        job("predict") + " --model {input.model:q} --activations {input.activations:q} --sparsity {input.sparsity:q}"
        " --layers {params.layers} --threads {threads} 2> {log:q}"
