/* A stand-in libnvidia-ml.so.1 for tests and drills.
 *
 * What it answers lies in the file named by EVERSTEP_NVML_STATE (see layout.py); every call opens that file anew, so a
 * change is seen by the next call of every process. As in the driver, the list of devices is the one at nvmlInit: a GPU
 * that vanishes afterwards is lost to those who hold it and absent for those who come later. XID events are appended to
 * the file beside it and wake the waiting at once. Functions of nvml.h that are not here are generated and answer
 * NVML_ERROR_NOT_SUPPORTED.
 */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <nvml.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

#define LOOK_MS 5
#define PASTE(a) V_##a,
enum { VALUES(PASTE) VALUE_COUNT };
#undef PASTE
#define PASTE(a) C_##a,
enum { CALLS(PASTE) CALL_COUNT };
#undef PASTE

struct header {
  uint64_t magic, layout;
  int32_t count, cuda, locked, reserved, order[GPUS];
  char driver[DRIVER_SIZE], nvml[NVML_SIZE], stuck[STUCK_SIZE];
};
struct record {
  char uuid[UUID_SIZE], name[NAME_SIZE], serial[SERIAL_SIZE], bus[BUS_SIZE];
  int64_t value[VALUE_COUNT];
  int32_t status[CALL_COUNT], delay[CALL_COUNT];
};
struct event {
  int32_t gpu, padding;
  uint64_t type, data;
  uint32_t gpu_instance, compute_instance;
};
struct nvmlDevice_st {
  int gpu, instance; /* the number of the record; -1: the whole GPU */
};
struct nvmlEventSet_st {
  int notices;
  off_t next, since[GPUS + 1];
  uint64_t types[GPUS + 1];
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER; /* where the state says that calls wait for each other */
static int users, listed, order[GPUS];
static char state_path[PATH_MAX], event_path[PATH_MAX + 8];
static struct nvmlDevice_st devices[GPUS + 1][INSTANCES + 1];

/* ---- state ---- */

static int read_state(struct header *head, struct record *rec, int gpu) {
  struct header own;
  int ok, file = open(state_path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  if (!head) head = &own;
  ok = pread(file, head, sizeof *head, 0) == (ssize_t)sizeof *head && head->magic == MAGIC && head->layout == LAYOUT;
  if (ok && rec)
    ok = pread(file, rec, sizeof *rec, (off_t)(sizeof *head + (size_t)gpu * sizeof *rec)) == (ssize_t)sizeof *rec;
  close(file);
  return ok;
}

static long long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static int held(const struct record *rec, int call, const struct header *head, long long begun) {
  int32_t delay = rec->delay[call] ? rec->delay[call] : rec->delay[C_any];
  if (delay == UNINTERRUPTIBLE) {
    struct stat ignored; /* a file of a mount that hangs: the kernel keeps this thread */
    stat(head->stuck, &ignored);
    return 1;
  }
  return delay == FOREVER || (delay > 0 && now_ms() - begun < delay);
}

/* Every call comes through here: it waits as long as the state says, and fails as the state says. */
static nvmlReturn_t enter(int gpu, int call, struct record *rec) {
  struct header head;
  long long begun = now_ms();
  int ok, locked;
  if (!users) return NVML_ERROR_UNINITIALIZED;
  locked = read_state(&head, rec, gpu) && head.locked;
  if (locked) pthread_mutex_lock(&driver_lock);
  while ((ok = read_state(&head, rec, gpu)) && held(rec, call, &head, begun)) usleep(LOOK_MS * 1000);
  if (locked) pthread_mutex_unlock(&driver_lock);
  if (!ok) return NVML_ERROR_UNKNOWN;
  if (gpu && (rec->value[V_lost] || !rec->value[V_present])) return NVML_ERROR_GPU_IS_LOST;
  if (gpu && rec->value[V_reset_required]) return NVML_ERROR_RESET_REQUIRED;
  if (rec->status[C_any]) return (nvmlReturn_t)rec->status[C_any];
  return (nvmlReturn_t)rec->status[call];
}

static int is_device(nvmlDevice_t d) {
  return (char *)d >= (char *)devices && (char *)d < (char *)devices + sizeof devices;
}

#define SYSTEM(call)                            \
  struct record r;                              \
  do {                                          \
    nvmlReturn_t failed = enter(0, C_##call, &r); \
    if (failed) return failed;                  \
  } while (0)

/* WHOLE: of a physical GPU only; EITHER: also of a MIG device. */
#define EITHER(call)                                   \
  struct record r;                                     \
  do {                                                 \
    nvmlReturn_t failed;                               \
    if (!is_device(d)) return NVML_ERROR_INVALID_ARGUMENT; \
    failed = enter(d->gpu, C_##call, &r);              \
    if (failed) return failed;                         \
  } while (0)
#define WHOLE(call) \
  EITHER(call);     \
  if (d->instance >= 0) return NVML_ERROR_NOT_SUPPORTED
#define V(name) r.value[V_##name]
#define VERSIONED(data, expected) \
  if ((data)->version != (expected)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH
#define N nvmlReturn_t
#define NUMBER(call, type, name)        \
  N call(nvmlDevice_t d, type *out) {   \
    WHOLE(call);                        \
    *out = (type)V(name);               \
    return NVML_SUCCESS;                \
  }
#define TEXT(call, member)                                          \
  N call(nvmlDevice_t d, char *out, unsigned int size) {            \
    WHOLE(call);                                                    \
    if (strlen(r.member) >= size) return NVML_ERROR_INSUFFICIENT_SIZE; \
    strcpy(out, r.member);                                          \
    return NVML_SUCCESS;                                            \
  }

/* ---- the system ---- */

N nvmlInitWithFlags(unsigned int flags) {
  const char *path = getenv("EVERSTEP_NVML_STATE");
  struct header head;
  struct record r;
  N failed = NVML_SUCCESS;
  (void)flags;
  pthread_mutex_lock(&turn);
  if (users) {
    users++;
    pthread_mutex_unlock(&turn);
    return NVML_SUCCESS;
  }
  snprintf(state_path, sizeof state_path, "%s", path ? path : "");
  snprintf(event_path, sizeof event_path, "%s.events", state_path);
  users = 1;
  pthread_mutex_unlock(&turn);
  if (!read_state(&head, NULL, 0)) failed = NVML_ERROR_DRIVER_NOT_LOADED;
  if (!failed) failed = enter(0, C_nvmlInit, &r);
  pthread_mutex_lock(&turn);
  if (failed) {
    users = 0;
  } else {
    read_state(&head, NULL, 0);
    listed = head.count;
    memcpy(order, head.order, sizeof order);
    for (int g = 0; g <= GPUS; g++)
      for (int i = 0; i <= INSTANCES; i++) devices[g][i] = (struct nvmlDevice_st){g, i - 1};
  }
  pthread_mutex_unlock(&turn);
  return failed;
}
N nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
N nvmlInit(void) { return nvmlInitWithFlags(0); }

N nvmlShutdown(void) {
  N result = NVML_SUCCESS;
  pthread_mutex_lock(&turn);
  if (users)
    users--;
  else
    result = NVML_ERROR_UNINITIALIZED;
  pthread_mutex_unlock(&turn);
  return result;
}

const char *nvmlErrorString(nvmlReturn_t r) {
  switch (r) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED: return "GPU requires restart";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
  }
}

static N system_text(int call, size_t offset, char *out, unsigned int size) {
  struct header head;
  struct record r;
  N failed = enter(0, call, &r);
  if (failed) return failed;
  read_state(&head, NULL, 0);
  snprintf(out, size, "%s", (char *)&head + offset);
  return NVML_SUCCESS;
}
N nvmlSystemGetDriverVersion(char *out, unsigned int size) {
  return system_text(C_nvmlSystemGetDriverVersion, offsetof(struct header, driver), out, size);
}
N nvmlSystemGetNVMLVersion(char *out, unsigned int size) {
  return system_text(C_any, offsetof(struct header, nvml), out, size);
}
N nvmlSystemGetCudaDriverVersion_v2(int *out) {
  struct header head;
  SYSTEM(any);
  read_state(&head, NULL, 0);
  *out = head.cuda;
  return NVML_SUCCESS;
}
N nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

/* ---- devices ---- */

N nvmlDeviceGetCount_v2(unsigned int *out) {
  SYSTEM(nvmlDeviceGetCount_v2);
  *out = (unsigned int)listed;
  return NVML_SUCCESS;
}
N nvmlDeviceGetCount(unsigned int *out) { return nvmlDeviceGetCount_v2(out); }

N nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out) {
  struct record r;
  if (!users) return NVML_ERROR_UNINITIALIZED;
  if (index >= (unsigned int)listed) return NVML_ERROR_INVALID_ARGUMENT;
  *out = &devices[order[index]][0];
  return enter(order[index], C_nvmlDeviceGetHandleByIndex_v2, &r);
}
N nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

static N by_text(const char *text, int call, size_t offset, nvmlDevice_t *out) {
  struct record r;
  if (!users) return NVML_ERROR_UNINITIALIZED;
  for (int i = 0; i < listed; i++) {
    if (!read_state(NULL, &r, order[i])) return NVML_ERROR_UNKNOWN;
    if (strcasecmp((char *)&r + offset, text)) continue;
    *out = &devices[order[i]][0];
    return enter(order[i], call, &r);
  }
  return NVML_ERROR_NOT_FOUND;
}
N nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
  return by_text(uuid, C_nvmlDeviceGetHandleByUUID, offsetof(struct record, uuid), out);
}
N nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *out) {
  return by_text(bus, C_nvmlDeviceGetHandleByPciBusId_v2, offsetof(struct record, bus), out);
}
N nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *out) { return nvmlDeviceGetHandleByPciBusId_v2(bus, out); }

static unsigned int index_of(int gpu) {
  unsigned int i = 0;
  while (i < (unsigned int)listed && order[i] != gpu) i++;
  return i;
}
N nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *out) {
  WHOLE(nvmlDeviceGetIndex);
  *out = index_of(d->gpu);
  return NVML_SUCCESS;
}
N nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned int *out) {
  WHOLE(nvmlDeviceGetMinorNumber);
  *out = (unsigned int)d->gpu - 1;
  return NVML_SUCCESS;
}
TEXT(nvmlDeviceGetSerial, serial)

N nvmlDeviceGetName(nvmlDevice_t d, char *out, unsigned int size) {
  EITHER(nvmlDeviceGetName);
  if (d->instance < 0)
    snprintf(out, size, "%s", r.name);
  else
    snprintf(out, size, "%s MIG %dg", r.name, (int)r.value[V_instance_slices_0 + d->instance]);
  return NVML_SUCCESS;
}
N nvmlDeviceGetUUID(nvmlDevice_t d, char *out, unsigned int size) {
  EITHER(nvmlDeviceGetUUID);
  if (d->instance < 0)
    snprintf(out, size, "%s", r.uuid);
  else /* the parent's, with the number of the instance in place of the first group */
    snprintf(out, size, "MIG-%08x-%s", d->instance + 1, strlen(r.uuid) > 13 ? r.uuid + 13 : r.uuid);
  return NVML_SUCCESS;
}
N nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *out) {
  WHOLE(nvmlDeviceGetPciInfo_v3);
  memset(out, 0, sizeof *out);
  sscanf(r.bus, "%x:%x:%x", &out->domain, &out->bus, &out->device);
  out->pciDeviceId = 0x233010de;
  snprintf(out->busId, sizeof out->busId, "%s", r.bus);
  snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%.15s", strlen(r.bus) > 4 ? r.bus + 4 : r.bus);
  return NVML_SUCCESS;
}

/* ---- readings ---- */

N nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *out) {
  WHOLE(nvmlDeviceGetUtilizationRates);
  if (V(mig)) return NVML_ERROR_NOT_SUPPORTED; /* so does a GPU in MIG mode */
  out->gpu = (unsigned int)V(utilisation);
  out->memory = (unsigned int)V(memory_utilisation);
  return NVML_SUCCESS;
}

static void memory_of(nvmlDevice_t d, const struct record *r, int64_t *total, int64_t *reserved, int64_t *used) {
  int i = d->instance;
  *total = r->value[i < 0 ? V_memory_total : V_instance_total_0 + i];
  *used = r->value[i < 0 ? V_memory_used : V_instance_used_0 + i];
  *reserved = i < 0 ? r->value[V_memory_reserved] : 0;
}
N nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *out) {
  int64_t total, reserved, used;
  EITHER(nvmlDeviceGetMemoryInfo);
  memory_of(d, &r, &total, &reserved, &used);
  out->total = (uint64_t)total;
  out->used = (uint64_t)(used + reserved); /* version 1 counts what is reserved as used */
  out->free = out->total - out->used;
  return NVML_SUCCESS;
}
N nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *out) {
  int64_t total, reserved, used;
  EITHER(nvmlDeviceGetMemoryInfo_v2);
  VERSIONED(out, nvmlMemory_v2);
  memory_of(d, &r, &total, &reserved, &used);
  out->total = (uint64_t)total;
  out->reserved = (uint64_t)reserved;
  out->used = (uint64_t)used;
  out->free = out->total - out->used - out->reserved;
  return NVML_SUCCESS;
}

N nvmlDeviceGetTemperature(nvmlDevice_t d, nvmlTemperatureSensors_t sensor, unsigned int *out) {
  WHOLE(nvmlDeviceGetTemperature);
  if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
  *out = (unsigned int)V(temperature);
  return NVML_SUCCESS;
}
N nvmlDeviceGetTemperatureV(nvmlDevice_t d, nvmlTemperature_t *out) {
  WHOLE(nvmlDeviceGetTemperatureV);
  VERSIONED(out, nvmlTemperature_v1);
  if (out->sensorType != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
  out->temperature = (int)V(temperature);
  return NVML_SUCCESS;
}
N nvmlDeviceGetTemperatureThreshold(nvmlDevice_t d, nvmlTemperatureThresholds_t which, unsigned int *out) {
  int value;
  WHOLE(nvmlDeviceGetTemperatureThreshold);
  switch (which) {
    case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: value = V_shutdown; break;
    case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: value = V_slowdown; break;
    case NVML_TEMPERATURE_THRESHOLD_MEM_MAX: value = V_memory_max; break;
    case NVML_TEMPERATURE_THRESHOLD_GPU_MAX: value = V_gpu_max; break;
    default: return NVML_ERROR_NOT_SUPPORTED;
  }
  *out = (unsigned int)r.value[value];
  return NVML_SUCCESS;
}
N nvmlDeviceGetMarginTemperature(nvmlDevice_t d, nvmlMarginTemperature_t *out) {
  WHOLE(nvmlDeviceGetMarginTemperature);
  VERSIONED(out, nvmlMarginTemperature_v1);
  out->marginTemperature = (int)V(headroom);
  return NVML_SUCCESS;
}

NUMBER(nvmlDeviceGetPowerUsage, unsigned int, power)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, power_limit)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned int, power_limit)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, reasons)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned int, replays)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, pcie_width_max)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, pcie_generation_max)

N nvmlDeviceGetClockInfo(nvmlDevice_t d, nvmlClockType_t which, unsigned int *out) {
  WHOLE(nvmlDeviceGetClockInfo);
  *out = (unsigned int)(which == NVML_CLOCK_MEM ? V(memory_clock) : V(sm_clock));
  return NVML_SUCCESS;
}
N nvmlDeviceGetMaxClockInfo(nvmlDevice_t d, nvmlClockType_t which, unsigned int *out) {
  WHOLE(nvmlDeviceGetMaxClockInfo);
  *out = (unsigned int)(which == NVML_CLOCK_MEM ? V(memory_clock_max) : V(sm_clock_max));
  return NVML_SUCCESS;
}

N nvmlDeviceGetEccMode(nvmlDevice_t d, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
  WHOLE(nvmlDeviceGetEccMode);
  *current = (nvmlEnableState_t)V(ecc_mode);
  *pending = (nvmlEnableState_t)V(ecc_pending);
  return NVML_SUCCESS;
}
N nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, nvmlMemoryErrorType_t type, nvmlEccCounterType_t since,
                              unsigned long long *out) {
  WHOLE(nvmlDeviceGetTotalEccErrors);
  if (!V(ecc_mode)) return NVML_ERROR_NOT_SUPPORTED;
  if (type == NVML_MEMORY_ERROR_TYPE_CORRECTED)
    *out = (uint64_t)(since == NVML_VOLATILE_ECC ? V(ecc_corrected_volatile) : V(ecc_corrected_aggregate));
  else
    *out = (uint64_t)(since == NVML_VOLATILE_ECC ? V(ecc_uncorrected_volatile) : V(ecc_uncorrected_aggregate));
  return NVML_SUCCESS;
}
N nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t d, nvmlEccSramErrorStatus_t *out) {
  WHOLE(nvmlDeviceGetSramEccErrorStatus);
  VERSIONED(out, nvmlEccSramErrorStatus_v1);
  memset(out, 0, sizeof *out);
  out->version = nvmlEccSramErrorStatus_v1;
  out->bThresholdExceeded = (unsigned int)V(sram_threshold);
  return NVML_SUCCESS;
}
N nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                            unsigned int *failed) {
  WHOLE(nvmlDeviceGetRemappedRows);
  *corrected = (unsigned int)V(remapped_corrected);
  *uncorrected = (unsigned int)V(remapped_uncorrected);
  *pending = (unsigned int)V(remap_pending);
  *failed = (unsigned int)V(remap_failed);
  return NVML_SUCCESS;
}

static N pages(int64_t count, unsigned int *size, unsigned long long *addresses) {
  unsigned int room = *size;
  *size = (unsigned int)count;
  if (room < (unsigned int)count || (count && !addresses)) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (int64_t i = 0; i < count; i++) addresses[i] = 0x1000ULL * (uint64_t)(i + 1);
  return NVML_SUCCESS;
}
N nvmlDeviceGetRetiredPages(nvmlDevice_t d, nvmlPageRetirementCause_t why, unsigned int *size, unsigned long long *out) {
  WHOLE(nvmlDeviceGetRetiredPages);
  return pages(why == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR ? V(retired_double) : V(retired_single), size, out);
}
N nvmlDeviceGetRetiredPages_v2(nvmlDevice_t d, nvmlPageRetirementCause_t why, unsigned int *size,
                               unsigned long long *out, unsigned long long *times) {
  WHOLE(nvmlDeviceGetRetiredPages_v2);
  N done = pages(why == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR ? V(retired_double) : V(retired_single), size, out);
  if (done == NVML_SUCCESS && times) memset(times, 0, *size * sizeof *times);
  return done;
}
N nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t d, nvmlEnableState_t *out) {
  WHOLE(nvmlDeviceGetRetiredPagesPendingStatus);
  *out = (nvmlEnableState_t)V(retired_pending);
  return NVML_SUCCESS;
}

N nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned int link, nvmlEnableState_t *out) {
  WHOLE(nvmlDeviceGetNvLinkState);
  if (link >= (unsigned int)V(links)) return V(links) ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
  *out = (nvmlEnableState_t)r.value[V_link_active_0 + link];
  return NVML_SUCCESS;
}
N nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t d, unsigned int link, nvmlNvLinkErrorCounter_t which,
                                  unsigned long long *out) {
  int value;
  WHOLE(nvmlDeviceGetNvLinkErrorCounter);
  if (link >= (unsigned int)V(links)) return V(links) ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
  switch (which) {
    case NVML_NVLINK_ERROR_DL_REPLAY: value = V_link_replay_0; break;
    case NVML_NVLINK_ERROR_DL_RECOVERY: value = V_link_recovery_0; break;
    case NVML_NVLINK_ERROR_DL_CRC_FLIT: value = V_link_crc_0; break;
    default: return NVML_ERROR_NOT_SUPPORTED;
  }
  *out = (uint64_t)r.value[value + (int)link];
  return NVML_SUCCESS;
}

static void answer(nvmlFieldValue_t *field, int gpu, struct record *r, int call, int value, nvmlValueType_t type,
                   int link) {
  field->nvmlReturn = r->delay[call] ? enter(gpu, call, r) : (nvmlReturn_t)r->status[call];
  if (link && field->scopeId >= (unsigned int)r->value[V_links]) field->nvmlReturn = NVML_ERROR_INVALID_ARGUMENT;
  if (field->nvmlReturn) return;
  field->valueType = type;
  field->value.ullVal = 0;
  value += link ? (int)field->scopeId : 0;
  if (type == NVML_VALUE_TYPE_SIGNED_INT)
    field->value.siVal = (int)r->value[value];
  else if (type == NVML_VALUE_TYPE_UNSIGNED_INT)
    field->value.uiVal = (unsigned int)r->value[value];
  else
    field->value.ullVal = (uint64_t)r->value[value];
}
N nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *fields) {
  WHOLE(nvmlDeviceGetFieldValues);
  for (int i = 0; i < count; i++) switch (fields[i].fieldId) {
#define FIELD(id, name, type, link) \
  case id: answer(&fields[i], d->gpu, &r, C_field_##id, V_##name, NVML_VALUE_TYPE_##type, link); break;
      FIELDS(FIELD)
      default: fields[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
  return NVML_SUCCESS;
}

N nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *size, nvmlProcessInfo_t *out) {
  EITHER(nvmlDeviceGetComputeRunningProcesses_v3);
  unsigned int room = *size, count = (unsigned int)V(processes);
  *size = count;
  if (!count) return NVML_SUCCESS;
  if (room < count || !out) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned int i = 0; i < count; i++) {
    out[i].pid = (unsigned int)r.value[V_process_pid_0 + i];
    out[i].usedGpuMemory = (uint64_t)r.value[V_process_memory_0 + i];
    out[i].gpuInstanceId = out[i].computeInstanceId = 0xFFFFFFFF;
  }
  return NVML_SUCCESS;
}
N nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t d, unsigned int *size, nvmlProcessInfo_t *out) {
  EITHER(nvmlDeviceGetMPSComputeRunningProcesses_v3);
  (void)out;
  *size = 0;
  return NVML_SUCCESS;
}

/* ---- MIG ---- */

N nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) {
  WHOLE(nvmlDeviceGetMigMode);
  *current = (unsigned int)V(mig);
  *pending = (unsigned int)V(mig_pending);
  return NVML_SUCCESS;
}
N nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *out) {
  WHOLE(nvmlDeviceGetMaxMigDeviceCount);
  *out = V(mig) ? INSTANCES : 0;
  return NVML_SUCCESS;
}
N nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *out) {
  WHOLE(nvmlDeviceGetMigDeviceHandleByIndex);
  if (index >= INSTANCES) return NVML_ERROR_INVALID_ARGUMENT;
  if (!V(mig) || index >= (unsigned int)V(instances)) return NVML_ERROR_NOT_FOUND;
  *out = &devices[d->gpu][index + 1];
  return NVML_SUCCESS;
}
N nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t d, nvmlDevice_t *out) {
  EITHER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
  if (d->instance < 0) return NVML_ERROR_INVALID_ARGUMENT;
  *out = &devices[d->gpu][0];
  return NVML_SUCCESS;
}
N nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned int *out) {
  EITHER(nvmlDeviceIsMigDeviceHandle);
  *out = d->instance >= 0;
  return NVML_SUCCESS;
}
#define INSTANCE(call)                                          \
  EITHER(call);                                                 \
  if (d->instance < 0) return NVML_ERROR_INVALID_ARGUMENT;      \
  if (d->instance >= V(instances)) return NVML_ERROR_NOT_FOUND
N nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned int *out) {
  INSTANCE(nvmlDeviceGetGpuInstanceId);
  *out = (unsigned int)r.value[V_instance_gi_0 + d->instance];
  return NVML_SUCCESS;
}
N nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned int *out) {
  INSTANCE(nvmlDeviceGetComputeInstanceId);
  *out = (unsigned int)r.value[V_instance_ci_0 + d->instance];
  return NVML_SUCCESS;
}
N nvmlDeviceGetAttributes_v2(nvmlDevice_t d, nvmlDeviceAttributes_t *out) {
  INSTANCE(nvmlDeviceGetAttributes_v2);
  memset(out, 0, sizeof *out);
  out->gpuInstanceSliceCount = out->computeInstanceSliceCount =
      (unsigned int)r.value[V_instance_slices_0 + d->instance];
  out->memorySizeMB = (unsigned long long)r.value[V_instance_total_0 + d->instance] >> 20;
  return NVML_SUCCESS;
}

/* ---- events ---- */

static off_t events_so_far(void) {
  struct stat info;
  return stat(event_path, &info) ? 0 : info.st_size;
}
N nvmlEventSetCreate(nvmlEventSet_t *out) {
  SYSTEM(nvmlEventSetCreate);
  struct nvmlEventSet_st *set = calloc(1, sizeof *set);
  if (!set) return NVML_ERROR_MEMORY;
  set->notices = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  if (set->notices < 0 || inotify_add_watch(set->notices, event_path, IN_MODIFY) < 0) {
    if (set->notices >= 0) close(set->notices);
    free(set);
    return NVML_ERROR_OPERATING_SYSTEM;
  }
  set->next = events_so_far();
  *out = set;
  return NVML_SUCCESS;
}
N nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *out) {
  WHOLE(nvmlDeviceRegisterEvents);
  *out = nvmlEventTypeXidCriticalError;
  return NVML_SUCCESS;
}
N nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set) {
  WHOLE(nvmlDeviceRegisterEvents);
  if (types & ~(unsigned long long)nvmlEventTypeXidCriticalError) return NVML_ERROR_NOT_SUPPORTED;
  pthread_mutex_lock(&turn);
  set->types[d->gpu] = types;
  set->since[d->gpu] = events_so_far();
  pthread_mutex_unlock(&turn);
  return NVML_SUCCESS;
}

static int next_event(nvmlEventSet_t set, struct event *found) {
  int file = open(event_path, O_RDONLY | O_CLOEXEC), got = 0;
  if (file < 0) return 0;
  while (!got && pread(file, found, sizeof *found, set->next) == (ssize_t)sizeof *found) {
    off_t at = set->next;
    set->next += (off_t)sizeof *found;
    if (found->gpu < 1 || found->gpu > GPUS) continue;
    pthread_mutex_lock(&turn);
    got = (set->types[found->gpu] & found->type) && at >= set->since[found->gpu];
    pthread_mutex_unlock(&turn);
  }
  close(file);
  return got;
}
N nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout) {
  long long until = now_ms() + timeout;
  struct event found;
  char notices[4096];
  SYSTEM(nvmlEventSetWait_v2);
  while (!next_event(set, &found)) {
    long long left = until - now_ms();
    struct pollfd ready = {set->notices, POLLIN, 0};
    if (left <= 0) return NVML_ERROR_TIMEOUT;
    poll(&ready, 1, (int)left);
    while (read(set->notices, notices, sizeof notices) > 0) continue;
  }
  *out = (nvmlEventData_t){&devices[found.gpu][0], found.type, found.data, found.gpu_instance, found.compute_instance};
  return NVML_SUCCESS;
}
N nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout) {
  return nvmlEventSetWait_v2(set, out, timeout);
}
N nvmlEventSetFree(nvmlEventSet_t set) {
  close(set->notices);
  free(set);
  return NVML_SUCCESS;
}
