"""What finding a prompt's beginning in the cache saves: seconds to the first token, computed and found.

    python bench/prefix.py [--model default] [--device auto] [--tokens 512] [--repeats 5]

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics

from slipstream import LLM, SamplingParams

TEXT = "You are a careful assistant of a library, who answers in one sentence and names the shelf. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=512, help="of the beginning that prompts share")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=1)
    computed: list[float] = []
    found: list[float] = []
    with LLM(options.model, drafter=None, device=options.device) as llm:
        shared = llm.get_tokenizer().encode(TEXT * (options.tokens // 8))[: options.tokens - 1]
        llm.generate([[1, 2, 3]], params)
        cached = 0
        for first in range(options.repeats):  # another first token is another prompt
            for times, question in ((computed, [7]), (found, [9, 8])):
                output = llm.generate([[first + 5, *shared, *question]], params)[0]
                times.append(output.outputs[0].timing.first_token_s)
            cached = output.num_cached_tokens
    line = {"tokens": options.tokens, "found": cached, "repeats": options.repeats}
    print(json.dumps({**line, "computed_s": statistics.median(computed), "found_s": statistics.median(found)}))


if __name__ == "__main__":
    main()
