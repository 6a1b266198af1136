rule order:
    input:
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
    output:
        f"{DEVICE}/order/{{chunk}}.json",
    log:
        f"{DEVICE}/logs/order/{{chunk}}.log",
    benchmark:
        f"{DEVICE}/benchmarks/order/{{chunk}}.tsv"
    threads: 1
    params:
        code=stage_digest("order"),
        heuristic=CONFIG.order,
        layers=layers,
    shell:
        RUN + " order --heuristic {params.heuristic:q} --activations {input.activations:q}"
        " --sparsity {input.sparsity:q} --layers {params.layers} --output {output:q} 2> {log:q}"
