rule tokenize:
    input:
        inputs.declared(inputs.corpus_files(CONFIG)),
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
        files=stamps(*inputs.corpus_files(CONFIG)),
        settings=flags("tokenize"),
    shell:
        job("tokenize") + " --model {input.model:q} 2> {log:q}"
