// Calls of the Vercel AI SDK: run in its own folder by try_clients.py.
//
//     node ai_sdk_calls.mjs URL MODEL
//
// Prints the packages' versions; throws at the first call that comes out otherwise than it should.

import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.cwd()}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, embedMany, jsonSchema, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "kvq", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(name);
const ask = { model, prompt: "Tell me of the sea.", temperature: 0, maxRetries: 0 };
const schema = jsonSchema({
  type: "object", properties: { a: { type: "boolean" } }, required: ["a"], additionalProperties: false,
});

const whole = await generateText({ ...ask, maxOutputTokens: 12 });
assert.equal(whole.usage.outputTokens, 12);
assert.equal(whole.finishReason, "length");
const streamed = streamText({ ...ask, maxOutputTokens: 12 });
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, whole.text);
const { object } = await generateObject({ ...ask, schema, maxOutputTokens: 60 });
assert.equal(typeof object.a, "boolean");
const called = await generateText({
  ...ask, maxOutputTokens: 120, toolChoice: "required", tools: { f: tool({ description: "One.", inputSchema: schema }) },
});
assert.equal(called.toolCalls[0].toolName, "f");
const { embeddings } = await embedMany({
  model: provider.textEmbeddingModel(name), values: ["the sea", "a city", "the sea"], maxRetries: 0,
});
assert.equal(embeddings.length, 3);
assert(embeddings[0].every((value, i) => Math.abs(value - embeddings[2][i]) < 1e-4));
const version = (one) => JSON.parse(readFileSync(`${process.cwd()}/node_modules/${one}/package.json`)).version;
console.log(`ai ${version("ai")}, @ai-sdk/openai-compatible ${version("@ai-sdk/openai-compatible")}`);
