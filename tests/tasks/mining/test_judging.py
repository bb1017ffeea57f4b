"""The judges of what was selected, with a scripted asker that answers by rule."""

import pytest

from models.providers.analyst import Refused
from models.providers.litellm_client import CallFailed
from tasks.mining.judging import judge_fit, user_answers
from tasks.mining.labelling import MiningSettings, Transcript
from tests.tasks.mining.test_labelling import CANDIDATES, CONTEXT, TRANSCRIPTS, ScriptedAsker


def test_judges_mark_what_no_environment_could_train():
    votes = iter(["broken_tool", "agent", "broken_tool"])

    def rule(request):
        cause = next(votes)
        return {"cause": cause, "reason": f"because of {cause}"}

    asker = ScriptedAsker(rule)
    fit = judge_fit(asker, CANDIDATES[0], [TRANSCRIPTS[1].id], TRANSCRIPTS, CONTEXT, MiningSettings())
    assert not fit.trainable
    assert (fit.cause, fit.reason, len(asker.questions)) == ("broken_tool", "because of broken_tool", 3)
    question = asker.questions[0]
    # The verdict follows from the reason, is one field, and is not suggested.
    assert list(question.schema.model_fields) == ["reason", "cause"]
    assert "lack" not in question.messages[0]["content"]
    assert user_answers(TRANSCRIPTS) in question.messages[0]["content"]


@pytest.mark.parametrize("votes", [("broken_tool", "", ""), ("broken_tool", "agent", ""), ("", "", "")])
def test_judges_that_say_nothing_do_not_let_one_decide(votes):
    votes = iter(votes)

    def rule(request):
        if not (cause := next(votes)):
            raise Refused("I will not")
        return {"cause": cause, "reason": f"because of {cause}"}

    fit = judge_fit(ScriptedAsker(rule), CANDIDATES[0], [], TRANSCRIPTS, CONTEXT, MiningSettings())
    assert (fit.trainable, fit.cause) == (True, "agent")


@pytest.mark.parametrize("status", [402, 503])
def test_a_judge_that_could_not_be_asked_is_asked_again_with_the_stage(status):
    failures = iter([None, CallFailed(f"failed ({status})", "", status, transient=status == 503), None])

    def rule(request):
        if problem := next(failures):
            raise problem
        return {"cause": "broken_tool", "reason": "a tool is odd"}

    with pytest.raises(CallFailed, match=str(status)):
        judge_fit(ScriptedAsker(rule), CANDIDATES[0], [], TRANSCRIPTS, CONTEXT, MiningSettings())


def test_judges_are_told_whether_the_user_answers():
    ask, tell = {"role": "assistant", "content": "Which order?"}, {"role": "user", "content": "W1."}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "get_order", "arguments": {}}]}

    def told(*conversations):
        return user_answers([Transcript(str(i), messages, False) for i, messages in enumerate(conversations)])

    assert told([tell, call]) == "In none of these conversations did the agent say anything to the user."
    assert told([tell, ask, tell], [tell, ask], [tell, call, tell]).endswith(
        "in 1 of the 2 conversations in which it said something."
    )
    assert told([tell, ask], [tell, call, ask]).startswith("The user answers nothing: not in one of the 2")
