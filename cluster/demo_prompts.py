"""What the demo asks: a dozen chats of mixed length. Four share a system prompt, one is above 1,500 tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One chat. `expects`: a word that the answer must hold; empty when any answer will do."""

    label: str
    messages: tuple[tuple[str, str], ...]
    max_tokens: int = 40
    expects: str = ""


_HARBOUR_GUIDE = """You answer for the harbour office of a small island. Be brief and friendly. What you know:
the ferry to the mainland leaves at seven in the morning, at noon and at six in the evening, and takes ninety minutes;
on Sundays only the noon ferry runs. A ticket costs eight coins, half for children, and bicycles travel free. The office
is open from six to seven, closed on holidays. Boats up to twelve metres may moor at the east pier for three nights;
longer boats use the outer wall and pay double. Drinking water is at the end of the pier, fuel only on weekdays before
four. The bakery opens at five, the market is on Wednesdays, and the lighthouse can be visited on dry afternoons. The
small beach is safe for swimming until September; the north cliffs are not. In a storm the harbour closes when two
red lamps are shown, and no boat may leave until one green lamp replaces them. The doctor comes on Tuesdays and
Fridays; at other times the nurse above the post office helps. Lost things wait in the blue chest beside the door."""

_WEATHER = (
    "a thin fog lay over the ice until noon",
    "the wind came from the north and shook the masts",
    "clear sky, and so cold that the ink froze twice",
    "light snow from early morning, none after dusk",
    "a grey swell, and rain that turned to sleet",
    "still air, the smoke of the stove rose straight up",
    "gusts from the west, strong enough to move the sledges",
)
_WORK = (
    "Two of us walked the line of bamboo poles and found the third one broken by a bear",
    "We cleaned the instruments, greased the winch and counted the tins in the store",
    "The dogs were fed early, and the youngest of them learned to pull beside her mother",
    "Marta drilled four holes through the ice and measured its thickness at each",
    "The carpenter mended the door of the hut, which no longer closed against the wind",
    "We hauled the boat a hundred paces higher, because the shore was cracking",
    "Jonas repaired the lamp of the telescope with wire from an old lantern",
    "The cook baked bread for three days, and the whole camp smelled of it",
    "Nobody left the hut; we wrote letters that no ship would carry before spring",
)
_FINDING = (
    "The ice measured ninety-one centimetres, two more than the week before",
    "The water below the ice was a little warmer than we had expected",
    "The compass pointed half a degree further east than in the old tables",
    "We counted eleven seals on the floe, and one white fox that followed them",
    "The barometer fell all day and rose again in the night",
    "A faint green light stood in the northern sky for almost an hour",
    "The drift had carried us four miles to the south since the last fixed star",
    "The plankton net came up full for the first time this month",
)


def expedition_log(days: int = 28) -> str:
    """A winter's diary, the same every time: about 50 tokens a day."""
    return "\n".join(
        f"Day {day}: {_WEATHER[day % len(_WEATHER)]}. {_WORK[day * 2 % len(_WORK)]}. "
        f"{_FINDING[day * 3 % len(_FINDING)]}, as noted in book {1 + day // 9}."
        for day in range(1, days + 1)
    )


def _user(label: str, text: str, max_tokens: int = 40, expects: str = "") -> DemoPrompt:
    return DemoPrompt(label, (("user", text),), max_tokens, expects)


def _harbour(label: str, text: str) -> DemoPrompt:
    return DemoPrompt(label, (("system", _HARBOUR_GUIDE), ("user", text)))


CAPITAL = _user("capital", "What is the capital of France?", 24, expects="Paris")

PROMPTS: tuple[DemoPrompt, ...] = (
    CAPITAL,
    _user(
        "long diary",
        "Here is the diary of a winter on the ice.\n\n" + expedition_log() + "\n\nSum it up in two sentences.",
        48,
    ),
    _harbour("harbour 1", "When does the ferry leave on a Sunday?"),
    _harbour("harbour 2", "May I take my bicycle on the ferry?"),
    _harbour("harbour 3", "What do two red lamps mean?"),
    _harbour("harbour 4", "Where can I get drinking water for my boat?"),
    _user("story", "Write the beginning of a story about a lighthouse keeper who finds a letter.", 96),
    _user("rainbow", "Explain in simple words why a rainbow has colours.", 64),
    _user("list", "List three things to pack for a day of hiking.", 48),
    _user("haiku", "Write a short poem about rain.", 40),
    _user("one word", "Say hello in one word.", 8),
    DemoPrompt(
        "turn two",
        (
            ("user", "My name is Ada and I am learning to bake bread."),
            ("assistant", "Nice to meet you, Ada! Bread is a good thing to learn. What would you like to know?"),
            ("user", "How long should the dough rest?"),
        ),
        48,
    ),
)
