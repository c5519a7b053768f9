// Vercel's AI SDK with a tool: a question, and another one in the same conversation, streamed.
// Usage: ai_sdk.cjs compatible|chat|responses
"use strict";

const { readFileSync } = require("node:fs");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");

const settings = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const MODELS = {
  compatible: () => createOpenAICompatible({ name: "here", ...settings })("policy"),
  chat: () => createOpenAI(settings).chat("policy"),
  responses: () => createOpenAI(settings).responses("policy"),
};

const read_file = tool({
  description: "Return the text of a file.",
  inputSchema: jsonSchema({ type: "object", properties: { name: { type: "string" } }, required: ["name"] }),
  execute: async ({ name }) => readFileSync(name, "utf8"),
});

async function run(model) {
  const asked = { model, tools: { read_file }, system: "Use the tool.", stopWhen: stepCountIs(8) };
  const messages = [{ role: "user", content: "Which lot is in lot.txt?" }];
  const first = await generateText({ ...asked, messages });
  console.log("generate:", first.text);
  messages.push(...first.response.messages, { role: "user", content: "Say it again." });
  let said = "";
  for await (const piece of streamText({ ...asked, messages }).textStream) said += piece;
  console.log("stream:", said);
}

run(MODELS[process.argv[2]]());
