IMATRIX_FILES = inputs.given_files(CONFIG, "imatrix")


# Runs early, so that a file of another model is refused before any long job.
rule importance:
    input:
        local(inputs.declared(IMATRIX_FILES)),
        model=f"{MODEL}/ingest.json",
        arrays=arrays(f"{MODEL}/ingest.json"),
    output:
        record=f"{DEVICE}/importance.json",
        arrays=directory(f"{DEVICE}/importance"),
    log:
        f"{DEVICE}/logs/importance.log",
    benchmark:
        f"{DEVICE}/benchmarks/importance.tsv"
    cache: CACHED
    priority: 1
    localrule: STORED
    resources:
        **needs("importance"),
    params:
        **commands.params(CONFIG, "importance", imatrix=None),
        files=inputs.stamps(CONFIG, IMATRIX_FILES),
    shell:
        commands.job("importance", "--imatrix {IMATRIX_FILES:q}")
