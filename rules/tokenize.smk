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
    params:
        code=code("tokenize"),
        files=stamps(*CORPUS_FILES),
        settings=flags("tokenize"),
    shell:
        job("tokenize") + " --model {input.model:q} 2> {log:q}"
