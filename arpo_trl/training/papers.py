"""The two papers, as model cards cite them."""

import textwrap


PAPERS = {
    "ARPO": {
        "title": "Agentic Reinforced Policy Optimization",
        "id": "2507.19849",
        "citation": textwrap.dedent("""\
            @article{dong2025arpo,
                title  = {{Agentic Reinforced Policy Optimization}},
                author = {Guanting Dong and Hangyu Mao and Kai Ma and Licheng Bao and Yifei Chen and Zhongyuan Wang and Zhongxia Chen and Jiazhen Du and Huiyang Wang and Fuzheng Zhang and Guorui Zhou and Yutao Zhu and Ji-Rong Wen and Zhicheng Dou},
                year   = 2025,
                eprint = {arXiv:2507.19849},
            }"""),
    },
    "AEPO": {
        "title": "Agentic Entropy-Balanced Policy Optimization",
        "id": "2510.14545",
        "citation": textwrap.dedent("""\
            @article{dong2025aepo,
                title  = {{Agentic Entropy-Balanced Policy Optimization}},
                author = {Guanting Dong and Licheng Bao and Zhongyuan Wang and Kangzhi Zhao and Xiaoxi Li and Jiajie Jin and Jinghan Yang and Hangyu Mao and Fuzheng Zhang and Kun Gai and Guorui Zhou and Yutao Zhu and Ji-Rong Wen and Zhicheng Dou},
                year   = 2025,
                eprint = {arXiv:2510.14545},
            }"""),
    },
}
