// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** 1536 -> "1.5 KiB". */
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 99.95 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** 0.0123 -> "12 ms", 75 -> "1 min 15 s". */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  if (value < 3599.5) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

/** A count with thin groups: 12345 -> "12 345". */
export function count(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

/** Unix seconds -> "12:03:04", in the viewer's own time zone. */
export function clock(unixS) {
  const at = new Date(unixS * 1000);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

/** "report-17#2": the job, and which of its choices if it is not the first. */
export function queryName(query) {
  return query.choice ? `${query.job}#${query.choice}` : query.job;
}
