CORPUS_FILES = checked(inputs.corpus_files, CONFIG)


rule tokenize:
    input:
        inputs.declared(CORPUS_FILES),
        model="ingest.json",
    output:
        "tokenize.json",
    log:
        "logs/tokenize.log",
    benchmark:
        "benchmarks/tokenize.tsv"
    threads: 1
    resources:
        mem_mb=mem_mb("tokenize"),
        runtime=runtime("tokenize"),
    params:
        code=commands.code(CONFIG, "tokenize"),
        files=inputs.stamps(CONFIG, CORPUS_FILES),
        settings=commands.settings(CONFIG, "tokenize"),
        records=commands.records,
    shell:
        commands.job("tokenize")
