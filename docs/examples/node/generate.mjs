// Submits a long job in the background, streams an urgent one, then waits for the first.
//   npm ci && BATOND_SERVER=127.0.0.1:7431 BATOND_TOKEN=... node generate.mjs
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { credentials, loadPackageDefinition, Metadata } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const { BATOND_SERVER = "127.0.0.1:7431", BATOND_TOKEN, BATOND_CA } = process.env;
const { JobService } = loadPackageDefinition(
  loadSync("batond/v1/jobs.proto", {
    includeDirs: [fileURLToPath(new URL("../../../proto", import.meta.url))],
    keepCase: true,
    enums: String,
    longs: String,
    oneofs: true,
  }),
).batond.v1;

const jobs = new JobService(
  BATOND_SERVER,
  BATOND_CA ? credentials.createSsl(readFileSync(BATOND_CA)) : credentials.createInsecure(),
);
const metadata = new Metadata();
if (BATOND_TOKEN) metadata.set("authorization", `Bearer ${BATOND_TOKEN}`);

const call = (method, request) =>
  new Promise((resolve, reject) =>
    jobs[method](request, metadata, { deadline: Date.now() + 30_000 }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    ),
  );

try {
  // The job lives in the queue: it goes on though this program ends, and the same id again would attach to it.
  const { job } = await call("SubmitJob", {
    spec: { text: { text: "Explain in detail how bread is made." }, sla_class: "batch", sampling: { max_tokens: 200 } },
  });

  // This one lives with its stream: leaving the loop early would cancel it.
  const stream = jobs.GenerateStream(
    {
      spec: {
        chat: { messages: [{ role: "user", content: "What is the capital of France?" }] },
        sla_class: "interactive",
        sampling: { max_tokens: 32 },
      },
    },
    metadata,
  );
  for await (const { event } of stream) {
    if (event.event === "chunk") process.stdout.write(event.chunk.text);
    else if (event.event === "finished") console.log(`\n[${event.finished.job.finish_reason}]`);
    else console.error(`[${event.event}]`); // queued, started, preempted, resumed
  }

  // A stream that broke is taken up again by WatchJob with the index of the next token.
  for await (const { event } of jobs.WatchJob({ job_id: job.job_id }, metadata)) {
    if (event.event === "finished") {
      const { state, output_tokens, preemptions } = event.finished.job;
      console.log(`${job.job_id}: ${state}, ${output_tokens} tokens, parked ${preemptions} times`);
    }
  }
} catch (error) {
  // error.details says what to do; error.code is the gRPC status.
  console.error(`batond: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  jobs.close();
}
