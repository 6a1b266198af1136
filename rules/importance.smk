IMATRIX_FILES = inputs.imatrix_files(CONFIG)


# Early, so that a file of another model is refused before anything long.
rule importance:
    input:
        inputs.declared(IMATRIX_FILES),
        model="ingest.json",
    output:
        f"{DEVICE}/importance.json",
    log:
        f"{DEVICE}/logs/importance.log",
    benchmark:
        f"{DEVICE}/benchmarks/importance.tsv"
    priority: 1
    threads: 1
    params:
        code=code("importance"),
        files=stamps(*IMATRIX_FILES),
        settings=flags("importance"),
    shell:
        job("importance") + " --model {input.model:q} 2> {log:q}"
