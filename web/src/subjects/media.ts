/** Images and sounds that were chosen in this browser: they stay in it and in the requests. */

import { Problem } from "../server/api";

/** The most pixels of an image, and bytes of a file, that a request may have. */
export const MOST_PIXELS = 2 ** 25;
const MOST_FILE = 48 * 2 ** 20;

export interface Picture {
  name: string;
  type: string;
  base64: string;
  bitmap: ImageBitmap;
}

export interface Sound {
  name: string;
  base64: string;
  /** Its address in this browser. */
  url: string;
  /** The largest deviations of its parts, one after the other; none where the browser cannot decode it. */
  peaks: Float32Array;
  /** Seconds; 0 where the browser cannot decode it. */
  duration: number;
}

/** Images by the name in the URL. */
export const pictures = new Map<string, Picture>();
/** Sounds by the name in the URL. */
export const sounds = new Map<string, Sound>();

/** Keep a file by its name, and return the name it got: of two files of one name the page keeps both. */
export function remember<T extends { name: string; base64: string }>(all: Map<string, T>, made: T): string {
  const kept = all.get(made.name);
  const name = kept && kept.base64 !== made.base64 ? `${all.size}-${made.name}` : made.name;
  all.set(name, { ...made, name });
  return name;
}

async function base64Of(file: File): Promise<string> {
  const raw = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < raw.length; at += 8192) text += String.fromCharCode(...raw.subarray(at, at + 8192));
  return btoa(text);
}

/** Read an image for a request, upright as its EXIF data say. Throws Problem for one that no request may have. */
export async function readPicture(file: File): Promise<Picture> {
  const refuse = (detail: string) => new Problem({ title: "This image cannot be sent", detail: `${file.name}: ${detail}`, param: "images" });
  if (!/^image\/(png|jpeg|webp|gif)$/.test(file.type)) throw refuse("expected a PNG, JPEG, WebP or GIF file.");
  if (file.size > MOST_FILE) throw refuse("its file has more than 48 MiB.");
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw refuse("it cannot be decoded.");
  }
  if (bitmap.width * bitmap.height > MOST_PIXELS) throw refuse(`it has ${bitmap.width} × ${bitmap.height} pixels; a request may have 33,554,432.`);
  return { name: file.name, type: file.type, base64: await base64Of(file), bitmap };
}

export const SOUND_FILES = ".wav,.flac,.ogg,.oga,.mp3";
const PARTS = 1024; // of a sound that is drawn
const RATE = 16_000; // at which it is decoded to be drawn

/** Read a sound for a request. Throws Problem for a file that no request may have; the server decodes it anew. */
export async function readSound(file: File): Promise<Sound> {
  const refuse = (detail: string) => new Problem({ title: "This sound cannot be sent", detail: `${file.name}: ${detail}`, param: "audio" });
  if (!/\.(wav|flac|ogg|oga|mp3)$/i.test(file.name)) throw refuse("expected a WAV, FLAC, OGG or MP3 file.");
  if (file.size > MOST_FILE) throw refuse("its file has more than 48 MiB.");
  const base64 = await base64Of(file);
  const made = { name: file.name, base64, url: URL.createObjectURL(file) };
  try {
    const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
    return { ...made, peaks: peaksOf(decoded.getChannelData(0)), duration: decoded.duration };
  } catch {
    return { ...made, peaks: new Float32Array(), duration: 0 };
  }
}

/** The largest magnitude in each of equal parts. */
function peaksOf(samples: Float32Array): Float32Array {
  const peaks = new Float32Array(Math.min(PARTS, samples.length));
  samples.forEach((each, at) => {
    const part = Math.floor((at * peaks.length) / samples.length);
    peaks[part] = Math.max(peaks[part], Math.abs(each));
  });
  return peaks;
}
