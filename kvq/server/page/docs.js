// Shows /openapi.json: the routes, the fields of their bodies with types and limits, and their answers.

import { element } from "/page/words.js";

const BOUNDS = {
  minimum: "≥ ", maximum: "≤ ", exclusiveMinimum: "> ", exclusiveMaximum: "< ",
  minLength: "characters ≥ ", maxLength: "characters ≤ ", minItems: "items ≥ ", maxItems: "items ≤ ",
};

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const union = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (union) return [...new Set(union.map(typeOf))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "anything"}`;
  return [schema.type ?? "anything"].flat().join(" or ");
}

function boundsOf(schema) {
  const parts = [schema, ...(schema.anyOf ?? schema.oneOf ?? [])];
  return parts.flatMap((part) =>
    Object.entries(BOUNDS).filter(([key]) => key in part).map(([key, words]) => words + part[key].toLocaleString("en")));
}

function table(heads, lines) {
  const made = element("table");
  for (const cells of [heads, ...lines]) {
    const row = element("tr");
    row.append(...cells.map((cell) => element(cells === heads ? "th" : "td", cell)));
    made.append(row);
  }
  return made;
}

function fields({ properties = {}, required = [] }) {
  const lines = Object.entries(properties).map(([name, field]) => {
    const standard = required.includes(name) ? "required" : "default" in field ? JSON.stringify(field.default) : "";
    return [name, typeOf(field), boundsOf(field).join(", "), standard, field.description ?? ""];
  });
  return table(["field", "type", "bounds", "default", ""], lines);
}

function route(title, operation, schemas) {
  const made = element("details");
  made.append(element("summary", operation.security?.length ? `${title}, needs a key` : title));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) made.append(element("h2", "Body"), fields(schemas[body.$ref?.split("/").pop()] ?? body));
  const answers = Object.entries(operation.responses).map(([status, { description = "" }]) => [status, description]);
  made.append(element("h2", "Answers"), table(["status", "when"], answers));
  return made;
}

async function write() {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`/openapi.json: ${answer.status}`);
  const { info, paths, components } = await answer.json();
  document.getElementById("version").textContent = info.version;
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      document.getElementById("routes").append(route(`${method.toUpperCase()} ${path}`, operation, components.schemas));
    }
  }
}

function tell(words, how) {
  const state = document.getElementById("state");
  state.textContent = words;
  state.dataset.state = how;
}

write().then(() => tell("ready", "ready"), (error) => tell(error.message, "lost"));
