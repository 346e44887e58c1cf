// What fake tensors on cuda:0 need under a build of torch for the CPU: a guard of that device, which has one stream and
// does nothing; and, for autograd, an accelerator. Such a build was compiled to have none, so that PyTorch's own calls of
// `getAccelerator` are led here for a while, through the table by which libtorch_cpu calls functions that it exports.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <link.h>

#include <cstring>

struct OneStream final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device device() { return {c10::DeviceType::CUDA, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, OneStream);

static const char* const name = "_ZN2at11accelerator14getAcceleratorEb";

static std::optional<c10::DeviceType> cuda(bool) { return c10::DeviceType::CUDA; }

// The entry of that function in the table of a loaded library; `found` is a void***.
static int find(dl_phdr_info* library, size_t, void* found) {
  if (!std::strstr(library->dlpi_name, "libtorch_cpu")) return 0;
  for (int i = 0; i < library->dlpi_phnum; i++) {
    if (library->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const ElfW(Rela)* calls = nullptr;
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    size_t bytes = 0;
    for (auto* entry = reinterpret_cast<ElfW(Dyn)*>(library->dlpi_addr + library->dlpi_phdr[i].p_vaddr); entry->d_tag; entry++) {
      if (entry->d_tag == DT_JMPREL) calls = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_PLTRELSZ) bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    }
    for (size_t at = 0; calls && symbols && names && at < bytes / sizeof(*calls); at++)
      if (!std::strcmp(names + symbols[ELF64_R_SYM(calls[at].r_info)].st_name, name))
        *static_cast<void***>(found) = reinterpret_cast<void**>(library->dlpi_addr + calls[at].r_offset);
  }
  return 1;
}

// What autograd asks of CUDA. PyTorch made its own object when it was imported, and has no place for another.
struct OneDevice final : at::CUDAHooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

static void*& methods_of(const at::CUDAHooksInterface& hooks) {
  return *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&hooks));
}

// Whether autograd finds a GPU from now on. Returns false where the table has no such entry.
extern "C" bool fake_cuda(bool is_there) {
  static void** const entry = [] {
    void** found = nullptr;
    dl_iterate_phdr(find, &found);
    return found;
  }();
  static const OneDevice ours;
  static void* const theirs = methods_of(at::detail::getCUDAHooks());
  methods_of(at::detail::getCUDAHooks()) = is_there ? methods_of(ours) : theirs;
  if (entry) *entry = is_there ? reinterpret_cast<void*>(&cuda) : dlsym(RTLD_DEFAULT, name);
  return entry != nullptr;
}
