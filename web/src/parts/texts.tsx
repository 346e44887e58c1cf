/** Boxes for what a model reads: a text of several lines, and the turns of a chat. */

import type { ComponentChildren, TargetedKeyboardEvent } from "preact";
import { usePage } from "../page/context";
import { clip } from "../numbers/format";
import { ROLES, nextTurn, shownChat } from "../subjects/chat";
import type { Turn } from "../subjects/chat";
import { Button, Choice } from "./ui";

const MOST_ROWS = { one: 6, several: 24 };

interface TextBoxProps {
  label: ComponentChildren;
  hint?: ComponentChildren;
  value: string;
  write: (text: string) => void;
  /** A box of several lines, where Enter adds one; else Enter asks, and Shift+Enter adds a line. */
  lines?: number;
  placeholder?: string;
  /** The text was changed, and the box left. */
  done?: () => void;
  over?: boolean;
}

/** A text that grows with its lines; Ctrl+Enter or Cmd+Enter asks. */
export function TextBox({ label, hint, value, write, lines = 1, placeholder, done, over = false }: TextBoxProps) {
  const several = lines > 1;
  const rows = Math.min(several ? MOST_ROWS.several : MOST_ROWS.one, Math.max(lines, value.split("\n").length));
  const press = (event: TargetedKeyboardEvent<HTMLTextAreaElement>) => {
    const asks = event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || (!several && !event.shiftKey));
    if (!asks) return;
    event.preventDefault();
    event.currentTarget.form?.requestSubmit();
  };
  return (
    <label class="wide text-box">
      <span>{label} {hint !== undefined && <span class={over ? "hint over" : "hint"}>{hint}</span>}</span>
      <textarea class={several ? "prose" : rows > 1 ? "prose line" : "line"} rows={rows} dir="auto" value={value} autocomplete="off" spellcheck={false} placeholder={placeholder} onInput={(event) => write(event.currentTarget.value)} onKeyDown={press} onChange={done} />
    </label>
  );
}

interface ChatProps {
  turns: Turn[];
  write: (turns: Turn[]) => void;
}

/** The turns to be written: a role and a text of each. */
export function Chat({ turns, write }: ChatProps) {
  const change = (at: number, part: Partial<Turn>) => write(turns.map((each, i) => (i === at ? { ...each, ...part } : each)));
  return (
    <>
      <ol class="chat" aria-label="The turns of the chat">
        {turns.map(({ role, content }, i) => (
          <li key={i}>
            <Choice label={`Role ${i + 1}`} value={role} set={(chosen) => change(i, { role: chosen })} options={[...new Set([...ROLES, role])].map((each): [string, string] => [each, each])} />
            <TextBox label={`Turn ${i + 1}`} value={content} write={(text) => change(i, { content: text })} lines={2} />
            <Button class="quiet" aria-label={`Remove turn ${i + 1}`} disabled={turns.length === 1} onClick={() => write(turns.filter((_, at) => at !== i))}>Remove</Button>
          </li>
        ))}
      </ol>
      <Button onClick={() => write([...turns, nextTurn(turns)])}>Add a turn</Button>
    </>
  );
}

const MOST_LETTERS = 240;

/** The chat that a view reads, and the way to change it. */
export function ChatLine({ turns, hint }: { turns: Turn[]; hint?: string }) {
  const { go } = usePage();
  return (
    <div class="wide chat-line">
      <span>A chat of {turns.length} {turns.length === 1 ? "turn" : "turns"} {hint && <span class="hint">{hint}</span>}</span>
      <p>{clip(shownChat(turns), MOST_LETTERS)}</p>
      <Button onClick={() => go({ view: "text" })}>Change the chat</Button>
      <Button class="quiet" onClick={() => go({ messages: "" })}>Read a text instead</Button>
    </div>
  );
}
