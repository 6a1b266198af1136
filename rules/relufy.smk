rule relufy:
    input:
        model="ingest.json",
        corpus="tokenize.json",
    output:
        "relufy.json",
    log:
        "logs/relufy.log",
    benchmark:
        "benchmarks/relufy.tsv"
    threads: 8
    params:
        code=code("relufy"),
        settings=flags("relufy"),
    shell:
        job("relufy") + " --model {input.model:q} --corpus {input.corpus:q} --threads {threads} 2> {log:q}"
