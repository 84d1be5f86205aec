"""What transformers answers on the default model's dequantised weights, and the prompts that it is asked.

Greedy output of two correct programs may differ where the two best logits are nearly equal. So each answer says how far
the two best logits are apart at every step, and is compared up to the first step where that is too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from cluster.text import Text

CLEAR_GAP = 1e-2
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 96, 127, 128, 160, 240, 300, 600, 1500)
PASSAGES = (
    "<|im_start|>user\nWhat is the capital of France, and why did it become the capital?<|im_end|>\n"
    "<|im_start|>assistant\nParis. The kings of the Franks made it their seat, and it has stayed that.<|im_end|>\n",
    "The ship left harbour before dawn. Nobody on the quay could say who had given the order, nor where she was bound; "
    "but the old pilot, who had seen three wars, took off his cap and watched until the lamps were gone.\n",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n",
    "Der Zug nach München fährt heute von Gleis sieben. "
    "Wegen Bauarbeiten verspätet sich die Ankunft um zehn Minuten.\n",
    "Le marché ouvre à huit heures; on y trouve du pain, des fruits, du fromage et, le samedi, des fleurs.\n",
    "El río baja lento entre los álamos, y al atardecer los niños vuelven a casa por el puente de piedra.\n",
    "1. Heat the oil. 2. Fry two onions until golden. "
    "3. Add a cup of rice and stir for a minute. 4. Pour in the stock.\n",
    "SELECT name, count(*) AS orders FROM customers "
    "JOIN orders USING (customer_id) GROUP BY name ORDER BY orders DESC;\n",
    "Water boils at a lower temperature on a mountain because the air pressure there is lower than at the sea.\n",
    "— Good morning, doctor. — Good morning. What brings you here? — I cannot sleep, and my left knee hurts.\n",
    '{"id": 17, "name": "lamp", "tags": ["home", "light"], "price": {"amount": 24.5, "currency": "EUR"}}\n',
    "Привет! Как дела? Сегодня хорошая погода, и мы идём гулять в парк.\n",
    "東京は日本の首都です。人口は約千四百万人です。\n",
    "Theorem. There are infinitely many primes. Proof. Suppose there are only finitely many, and multiply them all.\n",
    "BERLIN, Monday. The council voted late last night to keep the swimming pools open through the winter.\n",
    "Dear Ms Lindqvist, thank you for your letter of 4 May. We are sorry that the second parcel arrived damaged.\n",
    "for (size_t i = 0; i < rows; ++i) {\n  sum += weight[i] * value[i];  // the hot loop\n}\n",
    "Q: How many legs does a spider have?\nA: Eight.\nQ: How many legs does an ant have?\nA: Six.\n",
    "The cell is the smallest unit of life. Plants and animals are made of many cells, bacteria of a single one.\n",
    "Once upon a time there was a small tailor who lived by the edge of a large forest with his seven daughters.\n",
)


def prompts(text: Text) -> tuple[tuple[int, ...], ...]:
    """One prompt of each length, of token ids; each begins with a passage of its own, so none is another's prefix."""
    made = []
    for index, length in enumerate(LENGTHS):
        words = "".join(PASSAGES[index:] + PASSAGES[:index])
        made.append(text.encode(words * 4)[:length])
    assert tuple(map(len, made)) == LENGTHS
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, their log-probabilities, and the distance between the two best logits at each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]

    @property
    def clear(self) -> int:
        """Tokens before the first step at which the best logit is not clearly the best."""
        return next((i for i, gap in enumerate(self.gaps) if gap < CLEAR_GAP), len(self.gaps))


class Reference:
    """The answers of transformers' own reading of the model."""

    def __init__(self, model: transformers.LlamaForCausalLM) -> None:
        self._model = model

    @torch.inference_mode()
    def turns(self, prompt: Sequence[int], more: Sequence[int], count: int) -> tuple[Answer, Answer]:
        """The answer to the prompt, and the one to prompt + first answer + `more`; `count` tokens each."""
        cache = transformers.DynamicCache()
        first = self._greedy(prompt, count, cache)
        return first, self._greedy((first.token_ids[-1], *more), count, cache)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """(tokens, vocabulary): row i is the distribution of the token after i."""
        return torch.log_softmax(self._model(torch.tensor([tuple(token_ids)])).logits[0].float(), dim=-1)

    def _greedy(self, fed: Sequence[int], count: int, cache: transformers.DynamicCache) -> Answer:
        token_ids: list[int] = []
        logprobs: list[float] = []
        gaps: list[float] = []
        for _ in range(count):
            logits = self._model(torch.tensor([tuple(fed)]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
            best = logits.topk(2)
            token_ids.append(int(best.indices[0]))
            logprobs.append(float(torch.log_softmax(logits, dim=-1)[best.indices[0]]))
            gaps.append(float(best.values[0] - best.values[1]))
            fed = token_ids[-1:]
        return Answer(tuple(token_ids), tuple(logprobs), tuple(gaps))
