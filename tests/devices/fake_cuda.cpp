// Fake CUDA for a build of torch without it: a device guard and stub hooks, so that autograd runs on fake tensors.
#include <c10/core/impl/FakeGuardImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
using G = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
static c10::impl::DeviceGuardImplRegistrar reg(c10::DeviceType::CUDA, new G());
extern "C" int current() { return G::getDeviceIndex(); }
extern "C" void set_current(int i) { G::setDeviceIndex(i); }
struct FakeHooks : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 8; }
  c10::DeviceIndex getCurrentDevice() const override { return G::getDeviceIndex(); }
};
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::FakeHooks)
}
