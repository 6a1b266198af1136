rule place:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/place.json",
    log:
        f"{DEVICE}/logs/place.log",
    benchmark:
        f"{DEVICE}/benchmarks/place.tsv"
    threads: 1
    params:
        code=stage_digest("place"),
        solver=CONFIG.place,
        cache=CONFIG.cache,
    shell:
        RUN + " place --solver {params.solver:q} --cache {params.cache:q} --model {input.model:q}"
        " --activations {input.activations:q} --sparsity {input.sparsity:q} --device {input.device:q}"
        " --output {output:q} 2> {log:q}"
