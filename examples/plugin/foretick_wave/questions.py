"""`standing = "wave"`: what is asked of every session."""

from flash.question import Question

QUESTIONS = (
    Question("turn", "Did the price turn within the last three bars?", ("YES", "NO")),
    Question("half", "Is the last close in the upper or the lower half of the range?", ("UPPER", "LOWER")),
)
